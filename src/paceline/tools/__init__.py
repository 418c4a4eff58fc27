"""What the command ``paceline`` offers. The library knows nothing of it."""
