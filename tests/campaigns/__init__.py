"""Long campaigns against the program, run by hand: they kill it and damage its files many times, by a seed."""
