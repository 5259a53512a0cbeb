"""The web page of `assay view`: reads run folders, also damaged ones and runs in progress, and writes nothing there."""
