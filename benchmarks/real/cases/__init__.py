"""The cases, by package. A module imports the packages of its cases, so import it only to run them."""
