"""Several processes that train one model together: how they find each other, agree, and begin with equal weights."""
