"""The display of a run in the terminal, and its logs and metrics in its directory."""
