"""What any program needs: files, JSON and variables from outside, text, signals, ranks that wait for each other."""
