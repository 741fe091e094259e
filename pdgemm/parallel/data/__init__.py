"""Which samples a rank takes in a step, and their arrival while earlier ones are used."""
