"""Elements and arrays, wherever they lie: element types, devices, elements as functions of their indices."""
