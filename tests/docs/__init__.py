"""The documentation: its site, the recipes, and what a newcomer tries first."""
