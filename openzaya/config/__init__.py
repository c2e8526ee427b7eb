"""Recipes: `recipe.py` defines their fields, `load.py` reads, overrides, checks and writes them."""
