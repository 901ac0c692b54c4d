"""The proof that a parallel run equals the serial one, and what it says of how much was divided."""
