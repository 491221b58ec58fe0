"""Every published figure comes from here: measuring code only, which imports the package and is never imported by it."""
