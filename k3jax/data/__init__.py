"""Documents, tokens, the training stream, and the bigram baseline."""
