"""How the next tokens are chosen from the model's scores, and what is told of those scores."""
