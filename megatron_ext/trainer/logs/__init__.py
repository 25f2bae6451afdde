"""What a run says, in the terminal and in its directory."""
