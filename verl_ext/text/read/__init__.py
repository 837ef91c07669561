"""Find and read the records of files."""
