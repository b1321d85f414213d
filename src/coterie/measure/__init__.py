"""Take the profiles: the model on the meta device, the device by running one layer, the link by a probe."""
