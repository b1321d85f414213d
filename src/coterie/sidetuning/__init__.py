"""Side-tuning: a frozen backbone runs forward on weak devices, a small network beside it is trained on a server."""
