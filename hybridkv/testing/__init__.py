"""What tests of engines and of this library share. Needs nothing of pytest."""
