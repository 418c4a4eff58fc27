"""What exists because torch's own tests, libraries or messages ask for it."""
