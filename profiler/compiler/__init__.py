"""Stop between the two stages of AOTAutograd, to decide what a compiled graph saves."""
