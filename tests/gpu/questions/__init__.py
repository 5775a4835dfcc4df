"""Questions to a GPU's driver that no document answers, asked by driver calls alone."""
