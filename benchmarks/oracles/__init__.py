"""Two formulations from the literature, as a second opinion on the solver: they share no code with it."""
