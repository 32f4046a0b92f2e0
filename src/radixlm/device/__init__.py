"""What the hardware is and does: every call to a device goes through here."""
