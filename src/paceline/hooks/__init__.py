"""What is done to a full bucket."""
