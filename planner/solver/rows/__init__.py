"""Write the rows of the program: bytes at moments, moves over the link."""
