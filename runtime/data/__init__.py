"""What is trained on: text that every Python has, or rows of JSON Lines as tokens in packed sequences."""
