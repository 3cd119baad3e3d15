"""Where a server's rotations come from: named ones, those beside the weights, the cache, or calibration on the spot."""
