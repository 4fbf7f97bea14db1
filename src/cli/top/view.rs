//! The content of the screen of `isthmus top`, as a function of the last answers, the pressed keys, and the screen size. `opened` has
//! what is shown of one service or endpoint.

mod opened;

use std::collections::BTreeMap;
use std::time::Instant;

use isthmus_api::connection::Connection;
use isthmus_api::listed::{Service, states};
use isthmus_api::overview::Overview;
use isthmus_api::requests;
use isthmus_api::selection::Selection;
use isthmus_api::text::{ago, bytes, clean, counted, lasting, with_short_times};
use isthmus_console::output::{cells, fitting, padded};

/// The style of a part of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Warn,
    Bad,
    Chosen,
}

impl Style {
    /// Returns the parameters of the escape sequence for this style (ECMA-48 §8.3.117); `None` for plain text.
    pub(super) fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Bold => Some("1"),
            Self::Dim => Some("2"),
            Self::Good => Some("32"),
            Self::Warn => Some("33"),
            Self::Bad => Some("1;31"),
            Self::Chosen => Some("7"),
        }
    }
}

/// A line of the screen.
pub(super) type Line = Vec<(Style, String)>;

/// A key that the user pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Character(char),
    Enter,
    Escape,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    Tab,
    /// Ctrl-C, or the terminal was closed.
    Quit,
}

impl Key {
    /// Removes whole keys from the beginning of the bytes of a terminal and returns them; ignores unknown sequences.
    pub(super) fn take(bytes: &mut Vec<u8>) -> Vec<Self> {
        let mut keys = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let (key, length) = match rest {
                [0x1b, b'[' | b'O', middle @ ..] => {
                    // The sequence consists of parameters and one final byte (ECMA-48 §5.4).
                    let Some(end) = middle.iter().position(|byte| (0x40..0x7f).contains(byte)) else { break };
                    let key = match middle[end] {
                        b'A' => Some(Self::Up),
                        b'B' => Some(Self::Down),
                        b'C' => Some(Self::Right),
                        b'D' => Some(Self::Left),
                        _ => None,
                    };
                    (key, end + 3)
                }
                [0x1b] => break,
                [0x1b, ..] => (Some(Self::Escape), 1),
                [b'\r' | b'\n', ..] => (Some(Self::Enter), 1),
                [b'\t', ..] => (Some(Self::Tab), 1),
                [0x7f | 0x08, ..] => (Some(Self::Backspace), 1),
                [0x03 | 0x04, ..] => (Some(Self::Quit), 1),
                [byte @ 0x20..0x7f, ..] => (Some(Self::Character(char::from(*byte))), 1),
                // Host names are ASCII, so other bytes are ignored.
                _ => (None, 1),
            };
            keys.extend(key);
            at += length;
        }
        bytes.drain(..at);
        // An incomplete escape sequence is discarded if it is longer than the sequence of any key.
        if bytes.len() > 32 {
            bytes.clear();
        }
        keys
    }
}

/// The action that a key requires, besides drawing the screen again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    None,
    /// The overview must be requested again, since the view or the search has changed.
    Ask,
    Quit,
}

/// The names of the views, by number.
const VIEWS: [&str; 6] = ["services", "failures", "networks", "registries", "clients", "problems"];
/// The number of steps of the last 15 minutes that one character shows.
const STEPS_PER_BAR: usize = 3;
/// The largest length of a search text in bytes; further keys are ignored.
const SEARCH_MAX: usize = 253;

/// Rates of one service: connections and bytes per second.
type Rates = (f64, f64);
/// Connections and bytes since the start, by service; the sums are under the empty name.
type Counters = BTreeMap<String, (u64, u64)>;

/// The state of `isthmus top`.
pub(super) struct Top {
    admin: String,
    overview: Option<Box<Overview>>,
    /// The time at which the overview arrived, and its counters.
    counted: Option<(Instant, Counters)>,
    rates: BTreeMap<String, Rates>,
    /// The reason why the last request had no answer.
    away: Option<String>,
    paused: bool,
    view: usize,
    /// The number of the first visible line of the table; of a table whose rows can be opened: that of the chosen row.
    scrolled: usize,
    /// The name in the chosen row, which may move in the list.
    chosen: Option<String>,
    /// The service or route that is opened, and the address of the endpoint that is opened of it.
    service: Option<String>,
    endpoint: Option<String>,
    query: String,
    page: usize,
    /// The search text that is being typed.
    typing: Option<String>,
}

impl Top {
    pub(super) fn new(admin: String) -> Self {
        Self {
            admin,
            overview: None,
            counted: None,
            rates: BTreeMap::new(),
            away: None,
            paused: false,
            view: 0,
            scrolled: 0,
            chosen: None,
            service: None,
            endpoint: None,
            query: String::new(),
            page: 1,
            typing: None,
        }
    }

    /// Returns the path of the next request.
    pub(super) fn path(&self) -> String {
        let page = self.page.to_string();
        let opened = [("service", &self.service), ("endpoint", &self.endpoint)];
        let opened = opened.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
        let parameters: Vec<(&str, &str)> =
            [("q", self.query.as_str()), ("page", &page)].into_iter().chain(opened).collect();
        requests::OVERVIEW.with(&parameters)
    }

    /// Stores an overview, or the reason why the gateway did not answer.
    pub(super) fn received(&mut self, answer: Result<Box<Overview>, String>, now: Instant) {
        match answer {
            Err(why) => self.away = Some(why),
            Ok(overview) => {
                self.away = None;
                if !self.paused {
                    self.count(&overview, now);
                    // The overview may be the response to a request from before the last key, so the page number is limited
                    // again.
                    self.page = self.page.min(overview.services.pages.max(1));
                    self.overview = Some(overview);
                }
            }
        }
    }

    /// Computes the rates of new connections and bytes since the previous overview, for the gateway and for each service.
    fn count(&mut self, overview: &Overview, now: Instant) {
        let traffic = &overview.traffic;
        let moved = |up: u64, down: u64| up.saturating_add(down);
        let mut counts =
            BTreeMap::from([(String::new(), (traffic.opened, moved(traffic.bytes_up, traffic.bytes_down)))]);
        counts.extend(overview.services.shown.iter().map(|service| {
            (service.name.clone(), (service.opened, moved(service.bytes_up, service.bytes_down)))
        }));
        self.rates.clear();
        if let Some((then, before)) = &self.counted {
            let seconds = now.duration_since(*then).as_secs_f64().max(0.001);
            for (name, (opened, moved)) in &counts {
                let Some((opened_before, moved_before)) = before.get(name) else { continue };
                // The counters of a gateway that was restarted begin at 0.
                let rate = |count: &u64, before: &u64| count.saturating_sub(*before) as f64 / seconds;
                self.rates.insert(name.clone(), (rate(opened, opened_before), rate(moved, moved_before)));
            }
        }
        self.counted = Some((now, counts));
    }

    /// Handles a key.
    pub(super) fn pressed(&mut self, key: Key) -> Action {
        if let Some(text) = &mut self.typing {
            match key {
                Key::Character(character) if text.len() < SEARCH_MAX => text.push(character),
                Key::Backspace => drop(text.pop()),
                Key::Escape => self.typing = None,
                Key::Enter => {
                    self.query = self.typing.take().unwrap_or_default();
                    (self.page, self.view) = (1, 0);
                    self.open(None, None);
                    return Action::Ask;
                }
                Key::Quit => return Action::Quit,
                _ => {}
            }
            return Action::None;
        }
        match key {
            Key::Quit | Key::Character('q') => return Action::Quit,
            Key::Character(digit @ '1'..='6') => {
                self.view = digit as usize - '1' as usize;
                self.scrolled = 0;
            }
            Key::Tab | Key::Right => (self.view, self.scrolled) = ((self.view + 1) % VIEWS.len(), 0),
            Key::Left => (self.view, self.scrolled) = ((self.view + VIEWS.len() - 1) % VIEWS.len(), 0),
            Key::Down | Key::Character('j') => self.go(1),
            Key::Up | Key::Character('k') => self.go(-1),
            Key::Enter => {
                let names = self.names();
                let Some(name) = names.get(self.chosen_row(&names)).cloned() else { return Action::None };
                match self.service.take() {
                    None => self.open(Some(name), None),
                    service => self.open(service, Some(name)),
                }
                return Action::Ask;
            }
            Key::Character(' ') => self.paused = !self.paused,
            Key::Character('/') => self.typing = Some(String::new()),
            Key::Escape if self.service.is_some() => {
                let (service, endpoint) = (self.service.take(), self.endpoint.take());
                match endpoint {
                    None => self.open(None, None),
                    Some(_) => self.open(service.clone(), None),
                }
                self.chosen = endpoint.or(service);
                return Action::Ask;
            }
            Key::Escape if !self.query.is_empty() => {
                self.query.clear();
                self.page = 1;
                return Action::Ask;
            }
            Key::Character('n') => {
                let pages = self.overview.as_ref().map_or(1, |overview| overview.services.pages);
                (self.page, self.scrolled) = ((self.page + 1).min(pages.max(1)), 0);
                return Action::Ask;
            }
            Key::Character('p') => {
                (self.page, self.scrolled) = (self.page.saturating_sub(1).max(1), 0);
                return Action::Ask;
            }
            _ => {}
        }
        Action::None
    }

    /// Shows all services, the endpoints of a service, or the connections to an endpoint.
    fn open(&mut self, service: Option<String>, endpoint: Option<String>) {
        (self.service, self.endpoint, self.chosen, self.scrolled) = (service, endpoint, None, 0);
    }

    /// Moves by one row.
    fn go(&mut self, by: isize) {
        let names = self.names();
        if names.is_empty() {
            self.scrolled = self.scrolled.saturating_add_signed(by);
            return;
        }
        self.scrolled = self.chosen_row(&names).saturating_add_signed(by).min(names.len() - 1);
        self.chosen = names.get(self.scrolled).cloned();
    }

    /// Returns the names of the rows that can be opened; empty if those of this view cannot.
    fn names(&self) -> Vec<String> {
        let Some(overview) = self.overview.as_ref().filter(|_| self.view == 0) else { return Vec::new() };
        match (&self.service, &self.endpoint) {
            (None, _) => overview.services.shown.iter().map(|service| service.name.clone()).collect(),
            (Some(_), None) => {
                let selection = self.selection(overview);
                let endpoints = selection.map_or(&[][..], |selection| &selection.endpoints.shown);
                endpoints.iter().map(|endpoint| endpoint.address.clone()).collect()
            }
            (Some(_), Some(_)) => Vec::new(),
        }
    }

    /// Returns the number of the chosen row.
    fn chosen_row(&self, names: &[String]) -> usize {
        let found = self.chosen.as_ref().and_then(|chosen| names.iter().position(|name| name == chosen));
        found.unwrap_or(self.scrolled).min(names.len().saturating_sub(1))
    }

    /// Returns what is opened; `None` if the last answer is to an earlier request.
    fn selection<'o>(&self, overview: &'o Overview) -> Option<&'o Selection> {
        let selection = overview.selection.as_ref();
        selection.filter(|one| one.service == self.service && one.endpoint == self.endpoint)
    }

    /// Returns the lines of a screen of this width and height.
    pub(super) fn lines(&mut self, (width, height): (usize, usize)) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(why) = &self.away {
            lines.push(vec![(Style::Bad, format!("no answer from {}: {why}", self.admin))]);
            if self.overview.is_some() {
                lines.push(vec![(Style::Dim, "the data below is old; trying again".to_owned())]);
            }
        }
        let names = self.names();
        let chosen = (!names.is_empty()).then(|| self.chosen_row(&names));
        let Some(overview) = self.overview.take() else {
            if self.away.is_none() {
                lines.push(vec![(Style::Dim, format!("connecting to {}", self.admin))]);
            }
            return self.finished(lines, Vec::new(), None, (width, height));
        };
        lines.extend(self.head(&overview));
        let problems = &overview.status.problems;
        // The problems take at most a third of the screen.
        let most = (height / 3).max(1);
        for problem in problems.iter().take(most) {
            lines.push(vec![
                (Style::Bad, format!("  {}", problem.code)),
                (Style::Plain, format!("  {}", with_short_times(&problem.text, &overview.time))),
            ]);
        }
        if problems.len() > most {
            lines.push(vec![(Style::Dim, format!("  and {} more: key 6", problems.len() - most))]);
        }
        lines.push(self.tabs());
        let table = match self.view {
            0 if self.service.is_some() => {
                let selection = self.selection(&overview);
                let hints = selection.map(|selection| opened::hints(selection, &overview));
                lines.extend(hints.unwrap_or_default());
                self.opened(selection, &overview.time, width)
            }
            0 => self.services(&overview, width),
            1 => failures(&overview, width),
            2 => networks(&overview, width),
            3 => registries(&overview, width),
            4 => clients(&overview, width),
            _ => problems_in_full(&overview, width),
        };
        self.overview = Some(overview);
        self.finished(lines, table, chosen, (width, height))
    }

    /// Joins the head, the visible part of the table and the line of keys, and cuts them to the screen. `chosen` is the row that the keys
    /// can open.
    fn finished(
        &mut self,
        mut lines: Vec<Line>,
        table: Vec<Line>,
        chosen: Option<usize>,
        (width, height): (usize, usize),
    ) -> Vec<Line> {
        let room = height.saturating_sub(lines.len() + 1);
        if let Some((heading, rows)) = table.split_first() {
            let visible = room.saturating_sub(1);
            let first = match chosen {
                Some(chosen) => (chosen + 1).saturating_sub(visible),
                None => {
                    self.scrolled = self.scrolled.min(rows.len().saturating_sub(visible.max(1)));
                    self.scrolled
                }
            };
            lines.push(heading.clone());
            let begin = lines.len();
            lines.extend(rows.iter().skip(first).take(visible).cloned());
            let cell = chosen.and_then(|chosen| lines.get_mut(begin + chosen - first)?.first_mut());
            if let Some((style, _)) = cell {
                *style = Style::Chosen;
            }
        }
        lines.truncate(height.saturating_sub(1));
        while lines.len() + 1 < height {
            lines.push(Vec::new());
        }
        lines.push(match &self.typing {
            Some(text) => vec![
                (Style::Bold, format!("name contains: {text}_")),
                (Style::Dim, "   enter finds, esc leaves".to_owned()),
            ],
            None => vec![(
                Style::Dim,
                "q quit  1-6, tab view  enter open  / find  n/p page  space pause  esc back".to_owned(),
            )],
        });
        lines.into_iter().map(|line| cut(line, width)).collect()
    }

    fn head(&self, overview: &Overview) -> Vec<Line> {
        let status = &overview.status;
        let name = if status.node.name.is_empty() { "isthmus" } else { &status.node.name };
        let place = match (status.node.network.as_str(), status.node.cluster.as_str()) {
            ("", "") => String::new(),
            (network, "") => format!("  network {network}"),
            ("", cluster) => format!("  cluster {cluster}"),
            (network, cluster) => format!("  network {network}, cluster {cluster}"),
        };
        let (state, style) = match (status.draining, status.ready, status.problems.len()) {
            (true, _, _) => ("draining".to_owned(), Style::Warn),
            (_, true, 0) => ("ready, no problems".to_owned(), Style::Good),
            (_, true, count) => (format!("ready, {}", counted(count, "problem")), Style::Bad),
            (_, false, count) => (format!("not ready, {}", counted(count, "problem")), Style::Bad),
        };
        let (opened, moved) = self.rates.get("").copied().unwrap_or_default();
        let mut first =
            vec![(Style::Bold, name.to_owned()), (Style::Dim, place), (style, format!("  {state}"))];
        if self.paused {
            first.push((Style::Warn, "  paused".to_owned()));
        }
        let second = format!(
            "{} of {} connections, {opened:.0} new/s, {}/s, up {}, version {}",
            overview.traffic.active,
            status.limits.connections,
            bytes(moved),
            lasting(status.uptime_seconds),
            status.version,
        );
        let mut lines = vec![first, vec![(Style::Plain, second)]];
        let refusals: Vec<String> = overview
            .refusals
            .iter()
            .filter(|refusal| refusal.recent > 0)
            .map(|refusal| format!("{} {}", refusal.reason, refusal.recent))
            .collect();
        if !refusals.is_empty() {
            lines.push(vec![
                (Style::Warn, "refused or failed in 5 min: ".to_owned()),
                (Style::Plain, refusals.join(", ")),
            ]);
        }
        lines
    }

    fn tabs(&self) -> Line {
        let tab = |(index, name): (usize, &&str)| {
            let style = if index == self.view { Style::Chosen } else { Style::Dim };
            [(style, format!(" {} {name} ", index + 1)), (Style::Plain, " ".to_owned())]
        };
        VIEWS.iter().enumerate().flat_map(tab).collect()
    }

    fn services(&self, overview: &Overview, width: usize) -> Vec<Line> {
        let services = &overview.services;
        let found = if services.query.is_empty() {
            let things = if services.total == 1 { "service or route" } else { "services and routes" };
            format!("{} {things}", services.total)
        } else {
            format!("{} of {} contain {:?}", services.matching, services.total, services.query)
        };
        let page = format!("{found}, page {} of {}", services.page, services.pages.max(1));
        let row = |service: &Service| {
            let (opened, moved) = self.rates.get(&service.name).copied().unwrap_or_default();
            let (style, health) = match service.state.as_str() {
                states::DOWN => (Style::Bad, format!("down, {}/{} ready", service.ready, service.endpoints)),
                states::DEGRADED => (Style::Warn, format!("{}/{} ready", service.ready, service.endpoints)),
                states::ELSEWHERE => (Style::Dim, "none here".to_owned()),
                _ => (Style::Good, format!("{}/{} ready", service.ready, service.endpoints)),
            };
            let plain = |text: String| (Style::Plain, text);
            vec![
                plain(service.name.clone()),
                (style, health),
                plain(service.active.to_string()),
                plain(format!("{opened:.1}")),
                plain(format!("{}/s", bytes(moved))),
                plain(bars(&service.past.opened)),
                (if service.failed > 0 { Style::Warn } else { Style::Dim }, service.failed.to_string()),
            ]
        };
        let rows = services.shown.iter().map(row).collect();
        table(&[&page, "HEALTH", "ACTIVE", "NEW/S", "TRAFFIC", "15 MIN", "FAILED"], rows, width)
    }
}

/// Draws values as bars, [`STEPS_PER_BAR`] in one character; the highest bar is the largest sum. Nothing is drawn of no values.
fn bars(values: &[u64]) -> String {
    const BARS: [char; 9] =
        [' ', '\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}', '\u{2588}'];
    // Chunks from the end, so that the newest bar is of whole steps.
    let sums: Vec<u64> = values
        .rchunks(STEPS_PER_BAR)
        .rev()
        .map(|some| some.iter().fold(0_u64, |sum, one| sum.saturating_add(*one)))
        .collect();
    let most = sums.iter().copied().max().unwrap_or(0).max(1);
    let bar = |sum: &u64| {
        let eighths = (u128::from(*sum) * 8).div_ceil(u128::from(most));
        BARS[usize::try_from(eighths).unwrap_or(8).min(8)]
    };
    sums.iter().map(bar).collect()
}

/// Returns each problem with its whole text, wrapped to the width of the screen.
fn problems_in_full(overview: &Overview, width: usize) -> Vec<Line> {
    let problems = &overview.status.problems;
    let mut lines = vec![vec![(Style::Bold, format!("{} PROBLEMS", problems.len()))]];
    for problem in problems {
        lines.push(vec![(Style::Bad, problem.code.clone())]);
        let indented = |style: Style, text: &str| {
            wrapped(text, width.saturating_sub(2))
                .into_iter()
                .map(move |line| vec![(style, format!("  {line}"))])
        };
        let text = with_short_times(&problem.text, &overview.time);
        lines.extend(indented(Style::Plain, &text));
        lines.extend(indented(Style::Dim, &format!("see {}", problem.look_at)));
    }
    if problems.is_empty() {
        lines.push(vec![(Style::Dim, "none".to_owned())]);
    }
    lines
}

/// Breaks a text between words into lines of at most `width` cells; a longer word has a line of its own.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in clean(text).split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if cells(line) + 1 + cells(word) <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn failures(overview: &Overview, width: usize) -> Vec<Line> {
    let row = |failure: &Connection| {
        let time = ago(&failure.time, &overview.time);
        let detail = failure.detail.clone().unwrap_or_default();
        vec![
            (Style::Dim, time),
            (Style::Warn, failure.reason.clone().unwrap_or_default()),
            (Style::Plain, failure.name().unwrap_or("-").to_owned()),
            (Style::Dim, failure.source.clone()),
            (Style::Plain, failure.endpoint.clone().unwrap_or_else(|| "-".to_owned())),
            (Style::Dim, detail),
        ]
    };
    table(
        &["TIME", "REASON", "NAME", "SOURCE", "ENDPOINT", "DETAIL"],
        overview.failures.iter().map(row).collect(),
        width,
    )
}

fn networks(overview: &Overview, width: usize) -> Vec<Line> {
    let mut rows = Vec::new();
    for network in &overview.networks.shown {
        let name = if network.name.is_empty() { "(unknown)" } else { &network.name };
        let is_dead = network.gateways > 0 && network.gateways_up == 0 && network.distance.is_some();
        let distance = network.distance.as_ref().map(|distance| distance.text()).unwrap_or_default();
        rows.push(vec![
            (Style::Bold, name.to_owned()),
            (Style::Dim, network.access.clone()),
            (Style::Plain, distance),
            (Style::Plain, network.ring()),
            (
                if is_dead { Style::Bad } else { Style::Plain },
                format!("{} of {}", network.gateways_up, network.gateways),
            ),
            (Style::Plain, network.percent()),
            (Style::Dim, network.size()),
        ]);
        for gateway in overview.gateways.shown.iter().filter(|gateway| gateway.network == network.name) {
            let (style, state) = match (&gateway.why, gateway.state.as_str()) {
                (_, "unreachable") => (Style::Bad, "unreachable"),
                (Some(_), _) => (Style::Bad, "not usable"),
                (None, _) => (Style::Good, "usable"),
            };
            let empty = || (Style::Plain, String::new());
            let detail = gateway.why.clone().unwrap_or_else(|| gateway.locality.clone());
            rows.push(vec![
                (Style::Plain, format!("  {}", gateway.place())),
                (style, state.to_owned()),
                empty(),
                empty(),
                empty(),
                empty(),
                (Style::Dim, detail),
            ]);
        }
    }
    table(
        &["NETWORK AND GATEWAYS", "ACCESS OR STATE", "DISTANCE", "RING", "UP", "SHARE", "ENDPOINTS"],
        rows,
        width,
    )
}

fn registries(overview: &Overview, width: usize) -> Vec<Line> {
    let mut rows = Vec::new();
    for registry in &overview.status.registries {
        let style = if registry.state == "live" { Style::Good } else { Style::Bad };
        rows.push(vec![
            (Style::Plain, registry.name.clone()),
            (style, registry.state.clone()),
            (Style::Plain, registry.cluster.clone()),
            (Style::Plain, registry.services.to_string()),
            (Style::Plain, registry.endpoints.to_string()),
            (Style::Dim, registry.problems.first().cloned().unwrap_or_default()),
        ]);
    }
    table(&["REGISTRY", "STATE", "CLUSTER", "SERVICES", "ENDPOINTS", "PROBLEM"], rows, width)
}

fn clients(overview: &Overview, width: usize) -> Vec<Line> {
    let mut rows = Vec::new();
    for certificate in &overview.certificates.shown {
        let style = match certificate.state.as_str() {
            "valid" => Style::Good,
            "expiring" => Style::Warn,
            _ => Style::Bad,
        };
        rows.push(vec![
            (Style::Plain, certificate.subject()),
            (style, certificate.state.clone()),
            (Style::Dim, certificate.not_after.clone().unwrap_or_default()),
        ]);
    }
    for client in &overview.clients.shown {
        let (style, state) = match (client.nacks, client.unacknowledged_seconds) {
            (0, None) => (Style::Good, "acknowledged".to_owned()),
            (0, Some(waits)) => (Style::Warn, format!("waits {waits} s")),
            (nacks, _) => (Style::Bad, format!("{nacks} NACKs")),
        };
        rows.push(vec![
            (Style::Plain, format!("xDS {} ({})", client.node, client.network)),
            (style, state),
            (Style::Dim, client.last_nack.clone().unwrap_or_else(|| client.subscriptions.join(", "))),
        ]);
    }
    table(&["CERTIFICATES, XDS CLIENTS", "STATE", "UNTIL, OR SUBSCRIPTIONS"], rows, width)
}

/// The smallest width to which a column of a table is narrowed.
const COLUMN_MIN: usize = 6;

/// Narrows the widest columns, until the table is at most so wide, or no column is wider than [`COLUMN_MIN`].
fn narrow(columns: &mut [usize], width: usize) {
    while columns.iter().map(|column| column + 2).sum::<usize>() > width + 2 {
        let Some(widest) = columns.iter_mut().max().filter(|widest| **widest > COLUMN_MIN) else { return };
        *widest -= 1;
    }
}

/// Aligns the cells of a table under its headings; a table without rows says `none`. On a narrow screen, cells end with `…`.
fn table(headings: &[&str], rows: Vec<Line>, width: usize) -> Vec<Line> {
    let mut widths: Vec<usize> = headings.iter().map(|heading| cells(heading)).collect();
    let rows: Vec<Line> = rows
        .into_iter()
        .map(|row| row.into_iter().map(|(style, text)| (style, clean(&text))).collect())
        .collect();
    for row in &rows {
        for (widest, (_, text)) in widths.iter_mut().zip(row) {
            *widest = (*widest).max(cells(text));
        }
    }
    narrow(&mut widths, width);
    let aligned = |(text, width): (&str, &usize)| format!("{}  ", padded(&shortened(text, *width), *width));
    let heading: String = headings.iter().copied().zip(&widths).map(aligned).collect();
    let mut lines = vec![vec![(Style::Bold, heading)]];
    if rows.is_empty() {
        lines.push(vec![(Style::Dim, "none".to_owned())]);
    }
    for row in rows {
        let cells = row.into_iter().zip(&widths);
        lines.push(cells.map(|((style, text), width)| (style, aligned((&text, width)))).collect());
    }
    lines
}

/// Returns the beginning of a text that fits, with `…` at its end if something is missing.
fn shortened(text: &str, width: usize) -> String {
    if cells(text) <= width {
        text.to_owned()
    } else {
        format!("{}…", fitting(text, width.saturating_sub(1)))
    }
}

/// Cuts a line to the width of the screen. Blanks at its end are not missed.
fn cut(line: Line, width: usize) -> Line {
    let mut left = width;
    let mut shown = Vec::new();
    for (style, text) in line {
        if left == 0 {
            break;
        }
        let text = clean(&text);
        let bare = text.trim_end();
        let text = if cells(bare) > left { shortened(bare, left) } else { fitting(&text, left).to_owned() };
        left -= cells(&text).min(left);
        if !text.is_empty() {
            shown.push((style, text));
        }
    }
    shown
}

#[cfg(test)]
mod tests;
