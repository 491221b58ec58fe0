"""Every published figure comes from here. The rest of the package never imports it."""
