"""What turns accumulated gradients into new weights. Nothing distributed is in here."""
