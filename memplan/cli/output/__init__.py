"""Where answers go: the terminal, files, pictures, other tools' formats."""
