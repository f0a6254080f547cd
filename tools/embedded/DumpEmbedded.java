package kproxy.tools;

import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.File;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.protocol.types.BoundField;
import org.apache.kafka.common.protocol.types.Schema;
import org.apache.kafka.common.protocol.types.Struct;
import org.apache.kafka.common.protocol.types.Type;
import org.apache.kafka.connect.runtime.distributed.ConnectProtocol;
import org.apache.kafka.connect.runtime.distributed.ExtendedAssignment;
import org.apache.kafka.connect.runtime.distributed.ExtendedWorkerState;
import org.apache.kafka.connect.runtime.distributed.IncrementalCooperativeConnectProtocol;
import org.apache.kafka.connect.util.ConnectorTaskId;
import org.apache.kafka.streams.processor.TaskId;
import org.apache.kafka.streams.state.HostInfo;

/**
 * Writes as JSON what members of Kafka Connect and Kafka Streams put into JoinGroup and SyncGroup, version by version, and
 * vectors: bytes that the official classes made. Connect's are concatenations of Schema objects, which are compared with what
 * its own serializer writes; the subscription of Streams is a generated message; its assignment is written by code alone, whose
 * calls are noted (see Noted).
 *
 * Arguments: the paths of the layouts and of the vectors.
 */
public final class DumpEmbedded {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int EACH = 3;  // elements of each collection: no other number that is written
    private static final List<ObjectNode> vectors = new ArrayList<>();

    public static void main(String[] arguments) throws Exception {
        ObjectNode all = JSON.createObjectNode();
        connect(all);
        subscription(all.putObject("StreamsSubscriptionInfo"));
        assignment(all.putObject("StreamsAssignmentInfo"));
        JSON.writeValue(new File(arguments[0]), all);
        try (PrintStream out = new PrintStream(arguments[1], StandardCharsets.UTF_8)) {
            for (ObjectNode vector : vectors) out.println(JSON.writeValueAsString(vector));
        }
    }

    private static void require(boolean condition, String otherwise) {
        if (!condition) throw new IllegalStateException(otherwise);
    }

    private static ObjectNode vector(String name, int version, ByteBuffer bytes) {
        byte[] copy = new byte[bytes.remaining()];
        bytes.duplicate().get(copy);
        ObjectNode vector = JSON.createObjectNode();
        vector.put("name", name).put("version", version).put("hex", HexFormat.of().formatHex(copy));
        vectors.add(vector);
        return vector;
    }

    // ---------------------------------------------------------------------------------------------------- Connect

    private static Schema constant(Class<?> type, String name) throws ReflectiveOperationException {
        Field field = type.getDeclaredField(name);
        field.setAccessible(true);
        return (Schema) field.get(null);
    }

    private static void connect(ObjectNode all) throws Exception {
        Class<?> eager = ConnectProtocol.class, incremental = IncrementalCooperativeConnectProtocol.class;
        Schema header = constant(eager, "CONNECT_PROTOCOL_HEADER_SCHEMA");
        List<String> connectors = List.of("orders-sink", "clicks-source");
        List<ConnectorTaskId> tasks = List.of(new ConnectorTaskId("orders-sink", 0), new ConnectorTaskId("orders-sink", 1));
        ObjectNode states = all.putObject("ConnectWorkerState"), assignments = all.putObject("ConnectAssignment");
        for (short version = 0; version <= 2; version++) {
            boolean sessioned = version == 2;
            var assigned = new ExtendedAssignment(version, (short) 0, "leader-1", "http://one:8083/", 7, connectors, tasks,
                List.of("old-sink"), List.of(new ConnectorTaskId("old-sink", 2)), 300_000);
            var state = new ExtendedWorkerState("http://two:8083/", 7, assigned);
            List<Schema> said, given;
            ByteBuffer saidBytes, givenBytes;
            if (version == 0) {
                said = List.of(constant(eager, "CONFIG_STATE_V0"));
                given = List.of(constant(eager, "ASSIGNMENT_V0"));
                saidBytes = ConnectProtocol.serializeMetadata(state);
                givenBytes = ConnectProtocol.serializeAssignment(assigned);
            } else {
                said = List.of(constant(incremental, "CONFIG_STATE_V1"), constant(incremental, "ALLOCATION_V1"));
                given = List.of(constant(incremental, "ASSIGNMENT_V1"));
                saidBytes = IncrementalCooperativeConnectProtocol.serializeMetadata(state, sessioned);
                givenBytes = IncrementalCooperativeConnectProtocol.serializeAssignment(assigned, sessioned);
            }
            compared(header, said, saidBytes, version);
            compared(header, given, givenBytes, version);
            layout(states.putObject(String.valueOf(version)), said);
            layout(assignments.putObject(String.valueOf(version)), given);
            vector("ConnectWorkerState", version, saidBytes).put("url", state.url()).put("offset", state.offset());
            ObjectNode told = vector("ConnectAssignment", version, givenBytes);
            told.put("leader", assigned.leader()).put("leaderUrl", assigned.leaderUrl()).put("offset", assigned.offset());
            ArrayNode owned = told.putArray("owned");
            for (String connector : connectors) owned.add(connector);
            for (ConnectorTaskId task : tasks) owned.add(task.toString());
            ArrayNode revoked = told.putArray("revoked");
            if (version > 0) revoked.add("old-sink").add("old-sink-2");
        }
    }

    /** The official bytes are exactly these schemas, one after another, behind a header with the version. */
    private static void compared(Schema header, List<Schema> schemas, ByteBuffer official, short version) {
        ByteBuffer read = official.duplicate();
        Struct first = header.read(read);
        require(first.getShort(header.fields()[0].def.name) == version, "another version than " + version);
        for (Schema schema : schemas) schema.read(read);
        require(!read.hasRemaining(), "bytes behind version " + version);
    }

    private static void layout(ObjectNode node, List<Schema> schemas) {
        node.put("flexible", false);
        ArrayNode fields = node.putArray("fields");
        for (Schema schema : schemas) members(fields, schema);
    }

    private static void members(ArrayNode fields, Schema schema) {
        for (BoundField bound : schema.fields()) {
            String name = camel(bound.def.name);
            Type type = bound.def.type;
            ObjectNode field = fields.addObject().put("name", name);
            boolean nullable = type.isNullable();
            Type element = type.arrayElementType().orElse(type);
            String prefix = type.isArray() ? "[]" : "";
            if (element instanceof Schema struct) {
                field.put("type", prefix + name.substring(0, 1).toUpperCase() + name.substring(1)).put("nullable", nullable);
                members(field.put("flexible", false).putArray("fields"), struct);
            } else {
                String primitive = element.toString().replaceFirst("^NULLABLE_", "").toLowerCase();
                field.put("type", prefix + primitive).put("nullable", nullable);
            }
        }
    }

    private static String camel(String name) {
        String[] words = name.split("-");
        for (int i = 1; i < words.length; i++) words[i] = words[i].substring(0, 1).toUpperCase() + words[i].substring(1);
        return String.join("", words);
    }

    // ---------------------------------------------------------------------------------------------------- Streams

    private static void subscription(ObjectNode node) throws Exception {
        Class<?> type = Class.forName("org.apache.kafka.streams.internals.generated.SubscriptionInfoData");
        for (short version = Official.lowest(type); version <= Official.highest(type); version++) {
            Dump.struct(node.putObject(String.valueOf(version)), Layout.of(type, version));
        }
        Class<?> info = Class.forName("org.apache.kafka.streams.processor.internals.assignment.SubscriptionInfo");
        Constructor<?> make = Arrays.stream(info.getConstructors()).filter(each -> each.getParameterCount() == 8).findFirst()
            .orElseThrow();
        UUID process = new UUID(1, 2);
        Object id = make.getParameterTypes()[2] == UUID.class ? process
            : make.getParameterTypes()[2].getConstructor(UUID.class).newInstance(process);
        for (int version = 1; version <= Official.highest(type); version++) {
            Object made = make.newInstance(version, (int) Official.highest(type), id, "host-1:7070",
                Map.of(new TaskId(0, 1), 5L), (byte) 9, 0, Map.of("zone", "a"));
            ByteBuffer bytes = (ByteBuffer) info.getMethod("encode").invoke(made);
            vector("StreamsSubscriptionInfo", version, bytes).put("processId", process.toString()).put("endpoint", "host-1:7070");
        }
    }

    private static void assignment(ObjectNode node) throws Exception {
        Renamed loader = new Renamed("org.apache.kafka.streams.processor.internals.assignment.", "java/io/DataOutputStream",
            "kproxy/tools/Noted");
        Class<?> type = loader.loadClass("org.apache.kafka.streams.processor.internals.assignment.AssignmentInfo");
        Class<?> real = Class.forName(type.getName());
        int latest = (int) Class.forName("org.apache.kafka.streams.processor.internals.assignment.StreamsAssignmentProtocolVersions")
            .getField("LATEST_SUPPORTED_VERSION").get(null);
        for (int version = 1; version <= latest; version++) {
            Noted.calls.clear();
            ByteBuffer noted = encoded(type, version, latest);
            require(noted.equals(encoded(real, version, latest)), "the noted class writes something else");
            ArrayNode calls = node.putArray(String.valueOf(version));
            for (Noted.Call call : Noted.calls) calls.addArray().add(call.type()).add(call.value()).add(call.place());
            vector("StreamsAssignmentInfo", version, noted);
        }
    }

    private static ByteBuffer encoded(Class<?> type, int version, int latest) throws Exception {
        List<TaskId> active = new ArrayList<>();
        Map<TaskId, Set<TopicPartition>> standby = new LinkedHashMap<>();
        Map<HostInfo, Set<TopicPartition>> hosts = new LinkedHashMap<>(), standbyHosts = new LinkedHashMap<>();
        for (int i = 1; i <= EACH; i++) {
            Set<TopicPartition> some = new LinkedHashSet<>();
            for (int j = 1; j <= EACH; j++) some.add(new TopicPartition("topic-" + j, 3000 + j));
            String topology = version < 10 ? null : "abc".substring(0, EACH);
            active.add(new TaskId(1000 + i, 2000 + i, topology));
            standby.put(new TaskId(4000 + i, 5000 + i, topology), some);
            hosts.put(new HostInfo("active-" + i, 6000 + i), some);
            standbyHosts.put(new HostInfo("standby-" + i, 7000 + i), some);
        }
        Constructor<?> make = Arrays.stream(type.getDeclaredConstructors()).filter(each -> each.getParameterCount() == 7)
            .findFirst().orElseThrow();
        make.setAccessible(true);
        Object made = make.newInstance(version, 8000 + latest, active, standby, hosts, standbyHosts, 9001);
        if (version >= 7) type.getMethod("setNextRebalanceTime", long.class).invoke(made, 9002L);
        return (ByteBuffer) type.getMethod("encode").invoke(made);
    }
}
