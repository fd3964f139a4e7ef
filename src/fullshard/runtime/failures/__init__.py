"""What is told, and checked, when ranks go different ways."""
