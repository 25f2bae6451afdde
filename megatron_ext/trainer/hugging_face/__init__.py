"""Models of Hugging Face: from their folders to checkpoints of this project, and back."""
