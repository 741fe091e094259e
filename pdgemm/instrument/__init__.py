"""What a run did: seconds, words and messages, as sums and as spans of a trace."""
