"""The models of the protocols: every order of their steps, and planted mistakes. They import nothing of the product."""
