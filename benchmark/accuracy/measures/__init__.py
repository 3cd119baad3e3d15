"""What is measured, one measure per file."""
