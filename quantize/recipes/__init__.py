"""The built-in recipes: YAML files, each described by its first lines. Names are given to ``quantize.load_recipe``."""
