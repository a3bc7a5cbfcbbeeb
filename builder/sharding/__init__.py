"""One model over many ranks: what is legal, each rank's slices of the weights, and the processes that build them."""
