"""One rank's view of the others, and the engines that train a model on all of them."""
