"""Products as loops: each reads like its paper, and is made once of a `Call` and called again and again."""
