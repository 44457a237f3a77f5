"""Where the rows of a matrix are under ZeRO, and what ranks must tell each other about them."""
