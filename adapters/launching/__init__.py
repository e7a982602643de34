"""Engines as child processes: started by a recipe, watched, started again, stopped, and never left behind."""
