// The chosen theme, applied before the page is drawn. "" follows the system.
(() => {
  let theme = "";
  try {
    theme = localStorage.getItem("assay-theme") ?? "";
  } catch {
    // storage is disabled: the system's theme
  }
  if (theme) document.documentElement.dataset.theme = theme;
})();
