"""What all apps share beyond libraries: recipes, the run directory, signals, the command line."""
