"""What devices and links can do, and what follows from it: predictions and plans."""
