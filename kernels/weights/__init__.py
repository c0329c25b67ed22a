"""What a matrix is to the code that multiplies with it, and how it is quantised."""
