"""What the README claims about time and memory, rerun by one command each."""
