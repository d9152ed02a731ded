"""What commands answer, as documents: the search result, the advice, and the kinds and prices of what they compare."""
