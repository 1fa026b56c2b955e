"""What a call asks for, checked once and passed on whole."""
