"""``make gpu``: is a device's engine right, and how far is it from what the device's memory allows?"""
