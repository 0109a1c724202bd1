"""The page's script: contents that scroll, frames that keys can reach, folds that open for print.

The page is whole without it. It takes no data, so nothing that a stranger wrote is ever inside a script; and it scrolls
by itself, because in the interface of Kubeflow Pipelines a link to `#verdict` would load that interface into the frame.
"""

SCRIPT = """\
'use strict';
const calm = matchMedia('(prefers-reduced-motion: reduce)');
const contents = document.querySelector('nav');
const buttons = [...contents.querySelectorAll('button')];
contents.hidden = false;
for (const button of buttons) {
  button.addEventListener('click', () => {
    const heading = document.getElementById(button.dataset.to);
    heading.scrollIntoView({behavior: calm.matches ? 'auto' : 'smooth', block: 'start'});
    heading.focus({preventScroll: true});
  });
}
const seen = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const button of buttons) {
      if (button.dataset.to === entry.target.dataset.heading) button.setAttribute('aria-current', 'true');
      else button.removeAttribute('aria-current');
    }
  }
}, {rootMargin: '-20% 0px -70% 0px'});
document.querySelectorAll('section').forEach(section => seen.observe(section));
const frames = document.querySelectorAll('.scroll');
const reach = () => frames.forEach(frame => {
  const wider = frame.scrollWidth > frame.clientWidth + 1;
  for (const [name, value] of [['tabindex', '0'], ['role', 'group'], ['aria-label', frame.dataset.name]]) {
    if (wider) frame.setAttribute(name, value);
    else frame.removeAttribute(name);
  }
});
new ResizeObserver(reach).observe(document.body);
reach();
let folded = [];
addEventListener('beforeprint', () => {
  folded = [...document.querySelectorAll('details:not([open])')];
  folded.forEach(fold => { fold.open = true; });
});
addEventListener('afterprint', () => folded.forEach(fold => { fold.open = false; }));
"""
