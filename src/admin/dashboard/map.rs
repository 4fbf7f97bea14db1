//! A picture of the networks and their gateways: this gateway's network on the left, the other networks on the right, and a
//! line to each of them with the calls of its clients. The picture has a wide form, and a narrow form for small screens.

use super::html::Html;
use isthmus_api::network::{Gateway, Network};
use isthmus_api::overview::Overview;
use isthmus_api::text::encoded;

/// The largest number of other networks in the picture; the table below the picture lists further networks.
const NETWORKS_MAX: usize = 8;
/// The largest number of gateways of one network in the picture.
const GATEWAYS_MAX: usize = 4;
/// The height of a line of text, in SVG units.
const LINE: usize = 18;
/// The space between boxes, in SVG units.
const GAP: usize = 14;
/// The longest name in a box, in characters.
const NAME_MAX: usize = 44;

/// The dimensions of the map in one of its two forms, in SVG units.
struct Form {
    class: &'static str,
    width: usize,
    /// The left edge and width of the own network's box.
    own: (usize, usize),
    /// The left edge and width of the boxes of the other networks.
    others: (usize, usize),
    /// True if the boxes of the other networks are below that of the own network.
    below: bool,
}

const FORMS: [Form; 2] = [
    Form { class: "map wide", width: 900, own: (0, 300), others: (520, 380), below: false },
    Form { class: "map narrow", width: 360, own: (0, 360), others: (40, 320), below: true },
];

/// Draws the map in both forms; draws nothing if there is only one network.
pub(super) fn draw(html: &mut Html, overview: &Overview) {
    let own = &overview.status.node.network;
    let others: Vec<&Network> =
        overview.networks.shown.iter().filter(|network| network.name != *own).collect();
    if others.is_empty() {
        return;
    }
    for form in &FORMS {
        picture(html, overview, &others, form);
    }
}

fn of<'a>(overview: &'a Overview, network: &Network) -> Vec<&'a Gateway> {
    overview.gateways.shown.iter().filter(|gateway| gateway.network == network.name).collect()
}

fn picture(html: &mut Html, overview: &Overview, others: &[&Network], form: &Form) {
    let shown = &others[..others.len().min(NETWORKS_MAX)];
    let height_of = |network: &Network| {
        let gateways = of(overview, network).len();
        (2 + way(network, form).len() + gateways.min(GATEWAYS_MAX) + usize::from(gateways > GATEWAYS_MAX))
            * LINE
            + 12
    };
    let node = &overview.status.node.network;
    let listeners = overview.status.listeners.len().min(GATEWAYS_MAX);
    let own = overview.networks.shown.iter().find(|network| network.name == *node);
    let own_height = (3 + own.map_or(0, |own| stays(own).len()) + listeners) * LINE + 12;
    let hidden = others.len() - shown.len();
    let stack: usize = shown.iter().map(|network| height_of(network) + GAP).sum::<usize>()
        + if hidden > 0 { LINE + GAP } else { 0 };
    let height = if form.below { own_height + GAP + stack } else { own_height.max(stack) };
    html.raw("<svg")
        .attribute("class", form.class)
        .attribute("viewBox", format!("0 0 {} {height}", form.width));
    html.raw(" role=\"img\" aria-label=\"Networks and the gateways that lead to them; the same is in the table below\">\n");
    let own_top = if form.below { 0 } else { (height.saturating_sub(own_height)) / 2 };
    own_box(html, overview, form, own_top, own_height);
    let mut top = if form.below { own_height + GAP } else { (height.saturating_sub(stack)) / 2 };
    for network in shown {
        let tall = height_of(network);
        let gateways = of(overview, network);
        line(html, form, (own_top, own_height), (top, tall), network, &gateways);
        other_box(html, form, top, tall, network, &gateways);
        top += tall + GAP;
    }
    if hidden > 0 {
        words(html, "dim", form.others.0, top + LINE - 4, &format!("and {hidden} more networks"));
    }
    html.raw("</svg>\n");
}

/// Draws the line from the own network to another: solid if a gateway can be used, or if the endpoints are reached by address;
/// broken if the network cannot be reached.
fn line(
    html: &mut Html,
    form: &Form,
    own: (usize, usize),
    other: (usize, usize),
    network: &Network,
    gateways: &[&Gateway],
) {
    let direct = network.access == "direct";
    let open = direct || gateways.iter().any(|gateway| gateway.usable);
    let middle = other.0 + other.1 / 2;
    let path = if form.below {
        format!("M {x} {from} V {middle} H {to}", x = 16, from = own.0 + own.1, to = form.others.0)
    } else {
        let (from, start) = (form.own.0 + form.own.1, own.0 + own.1 / 2);
        let turn = (from + form.others.0) / 2;
        format!("M {from} {start} C {turn} {start} {turn} {middle} {to} {middle}", to = form.others.0)
    };
    let class = if open { "way" } else { "way closed" };
    html.raw("<path").attribute("class", class).attribute("d", path).raw("/>\n");
    if !form.below {
        let label = match (direct, open) {
            (true, _) => "by address",
            (false, true) => "through gateways",
            (false, false) => "no usable gateway",
        };
        let class = if open { "dim end" } else { "bad end" };
        // The label is on the outer side of the curve, where it does not cross the line.
        let base = if middle > own.0 + own.1 / 2 { middle + 15 } else { middle - 7 };
        words(html, class, form.others.0 - 12, base, label);
        if let Some(calls) = calls(network) {
            let base = if base > middle { base + 15 } else { base - 15 };
            let class =
                if network.calls.is_some_and(|calls| calls.failed > 0) { "warn end" } else { "plain end" };
            words(html, class, form.others.0 - 12, base, &calls);
        }
    }
}

fn frame(html: &mut Html, class: &'static str, (left, width): (usize, usize), top: usize, height: usize) {
    html.raw("<rect").attribute("class", class);
    for (name, value) in [("x", left), ("y", top), ("width", width), ("height", height)] {
        html.attribute(name, value.to_string());
    }
    html.raw(" rx=\"5\"/>\n");
}

fn words(html: &mut Html, class: &'static str, left: usize, base: usize, text: &str) {
    html.raw("<text").attribute("class", class);
    html.attribute("x", left.to_string()).attribute("y", base.to_string()).raw(">");
    html.text(short(text)).raw("</text>\n");
}

fn own_box(html: &mut Html, overview: &Overview, form: &Form, top: usize, height: usize) {
    let (left, node) = (form.own.0 + 12, &overview.status.node);
    frame(html, "box own", (form.own.0 + 1, form.own.1 - 2), top + 1, height - 2);
    let mut base = top + LINE + 2;
    let mut next = || {
        base += LINE;
        base - LINE
    };
    name(html, left, next(), &node.network);
    let own = overview.networks.shown.iter().find(|network| network.name == node.network);
    words(html, "dim", left, next(), &own.map_or_else(|| "no endpoints".to_owned(), |own| own.size()));
    for line in own.map(stays).unwrap_or_default() {
        words(html, "plain", left, next(), &line);
    }
    let this = if node.name.is_empty() { String::new() } else { format!(": {}", node.name) };
    words(html, "plain", left, next(), &format!("this gateway{this}"));
    for listener in overview.status.listeners.iter().take(GATEWAYS_MAX) {
        let address = listener.address.as_deref().unwrap_or("closed");
        words(html, "dim", left, next(), &format!("{} {} {address}", listener.protocol, listener.name));
    }
}

fn other_box(
    html: &mut Html,
    form: &Form,
    top: usize,
    height: usize,
    network: &Network,
    gateways: &[&Gateway],
) {
    let left = form.others.0 + 12;
    frame(html, "box", (form.others.0, form.others.1 - 1), top + 1, height - 2);
    let mut base = top + LINE + 2;
    let mut next = || {
        base += LINE;
        base - LINE
    };
    name(html, left, next(), &network.name);
    words(html, "dim", left, next(), &network.size());
    for line in way(network, form) {
        words(html, "plain", left, next(), &line);
    }
    for gateway in gateways.iter().take(GATEWAYS_MAX) {
        let is_dead = gateway.state == "unreachable";
        let is_well = gateway.usable && !is_dead || network.access == "direct";
        let dead = if is_dead { ", does not answer" } else { "" };
        let class = if is_well { "plain" } else { "bad" };
        words(html, class, left, next(), &format!("{}{dead}", gateway.place()));
    }
    if gateways.len() > GATEWAYS_MAX {
        words(html, "dim", left, next(), &format!("and {} more gateways", gateways.len() - GATEWAYS_MAX));
    }
}

/// Returns lines with the distance of a network, the share of the calls that it gets if any service has steering, and, where the line to
/// the network has no room for them, its calls.
fn way(network: &Network, form: &Form) -> Vec<String> {
    let distance =
        network.distance.as_ref().map(|distance| format!("{}, ring {}", distance.text(), distance.ring));
    let share = network.share.map(|_| format!("{} of calls", network.percent()));
    let calls = calls(network).filter(|_| form.below);
    [distance, share, calls].into_iter().flatten().collect()
}

/// Returns lines with the calls of the gateway's own network: the share that stays, and those to this gateway.
fn stays(own: &Network) -> Vec<String> {
    let share = own.share.map(|_| format!("{} of its calls stay", own.percent()));
    share.into_iter().chain(calls(own)).collect()
}

/// Returns the calls of a network's clients to this gateway, if there were any lately.
fn calls(network: &Network) -> Option<String> {
    network.calls.map(|calls| format!("calls from it: {}", calls.text()))
}

/// Writes the name of a network as a link to its page.
fn name(html: &mut Html, left: usize, base: usize, network: &str) {
    html.raw("<a").attribute("href", link_to(network)).raw(">");
    words(html, "name", left, base, &named(network));
    html.raw("</a>\n");
}

/// Returns the address of the page of a network.
pub(super) fn link_to(network: &str) -> String {
    format!("/?network={}", encoded(network))
}

/// Returns the name of a network, or a phrase for the unknown network.
pub(super) fn named(network: &str) -> String {
    if network.is_empty() { "unknown network".to_owned() } else { network.to_owned() }
}

fn short(text: &str) -> String {
    if text.chars().count() <= NAME_MAX {
        return text.to_owned();
    }
    let cut: String = text.chars().take(NAME_MAX - 1).collect();
    format!("{cut}…")
}
