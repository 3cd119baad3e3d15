"""What a fit or a file says about itself."""
