package kproxy.tools;

import static kproxy.tools.Official.require;

import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.lang.reflect.ParameterizedType;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.protocol.types.ArrayOf;
import org.apache.kafka.common.protocol.types.BoundField;
import org.apache.kafka.common.protocol.types.CompactArrayOf;
import org.apache.kafka.common.protocol.types.Schema;
import org.apache.kafka.common.protocol.types.TaggedFields;
import org.apache.kafka.common.protocol.types.Type;
import org.apache.kafka.common.record.internal.MemoryRecords;

/**
 * One version of a generated class or of a struct in it. Order, encoding and tags come from the Schema that the class carries;
 * names as in JSON and the access come from the class; whether null may be written is found out by writing it, since not every
 * release's Schema can tell.
 */
final class Layout {
    static final class Member {
        final Field access;
        final String name;
        final String type;          // a primitive of ours, or the struct's class
        final boolean array;
        final Boolean compact;      // null where there is no length to encode
        final Integer tag;
        final Layout struct;
        boolean nullable;

        private Member(Field access, String type, boolean array, Boolean compact, Integer tag, Layout struct) {
            this.access = access;
            this.name = access.getName();
            this.type = type;
            this.array = array;
            this.compact = compact;
            this.tag = tag;
            this.struct = struct;
        }
    }

    private static final Set<String> PRIMITIVES = Set.of("bool", "int8", "int16", "uint16", "int32", "uint32", "int64",
        "float64", "uuid", "string", "bytes", "records");
    private static final Set<String> WITH_LENGTH = Set.of("string", "bytes", "records");

    final Class<?> type;
    final List<Member> plain = new ArrayList<>();    // in the order of the wire
    final List<Member> tagged = new ArrayList<>();   // by tag
    final boolean flexible;

    static Layout of(Class<?> message, short version) throws ReflectiveOperationException {
        var schema = ((Schema[]) message.getField("SCHEMAS").get(null))[version];
        var layout = new Layout(message, schema);
        layout.findNullable(layout, List.of(), version);
        return layout;
    }

    private Layout(Class<?> type, Schema schema) throws ReflectiveOperationException {
        this.type = type;
        Map<String, Field> fields = new HashMap<>();
        for (Field field : type.getDeclaredFields()) {
            if (Modifier.isStatic(field.getModifiers()) || field.getName().equals("_unknownTaggedFields")) continue;
            field.setAccessible(true);
            require(fields.put(schemaName(field.getName()), field) == null, type + ": two fields of one name");
        }
        BoundField[] bound = schema.fields();
        boolean flexible = false;
        for (int i = 0; i < bound.length; i++) {
            if (bound[i].def.type instanceof TaggedFields section) {
                require(i == bound.length - 1, type + ": something follows the tag section");
                flexible = true;
                for (var entry : tagsOf(section).entrySet())
                    tagged.add(member(entry.getValue(), entry.getKey(), fields));
            } else {
                plain.add(member(bound[i].def, null, fields));
            }
        }
        this.flexible = flexible;
        for (Member member : members())
            require(member.struct == null || member.struct.flexible == flexible, type + ": flexible only in part");
    }

    List<Member> members() {
        var all = new ArrayList<>(plain);
        all.addAll(tagged);
        return all;
    }

    /** As the generator of the classes derives it: "ISRNodes" is "isr_nodes" nowhere, but "isrnodes". */
    private static String schemaName(String javaName) {
        String capitalised = javaName.substring(0, 1).toUpperCase(Locale.ROOT) + javaName.substring(1);
        return capitalised.replaceAll("(?<=[^A-Z])(?=[A-Z])", "_").toLowerCase(Locale.ROOT);
    }

    @SuppressWarnings("unchecked")
    private static Map<Integer, org.apache.kafka.common.protocol.types.Field> tagsOf(TaggedFields section)
            throws ReflectiveOperationException {
        Field fields = TaggedFields.class.getDeclaredField("fields");
        fields.setAccessible(true);
        return new TreeMap<>((Map<Integer, org.apache.kafka.common.protocol.types.Field>) fields.get(section));
    }

    private Member member(org.apache.kafka.common.protocol.types.Field def, Integer tag, Map<String, Field> fields)
            throws ReflectiveOperationException {
        Field access = fields.get(def.name);
        require(access != null, type + " has no field for " + def.name);
        if (def.type instanceof Schema schema) {
            var struct = new Layout(access.getType(), schema);
            return new Member(access, struct.type.getSimpleName(), false, null, tag, struct);
        }
        if (!(def.type instanceof ArrayOf || def.type instanceof CompactArrayOf)) {
            String name = primitive(def.type);
            return new Member(access, name, false, WITH_LENGTH.contains(name) ? isCompact(def.type) : null, tag, null);
        }
        boolean compact = def.type instanceof CompactArrayOf;
        Type element = def.type.arrayElementType().orElseThrow();
        require(!element.isNullable(), type + "." + def.name + ": elements that may be null");
        if (element instanceof Schema schema) {
            var struct = new Layout(elementClass(access), schema);
            return new Member(access, struct.type.getSimpleName(), true, compact, tag, struct);
        }
        String name = primitive(element);
        require(!WITH_LENGTH.contains(name) || isCompact(element) == compact, type + "." + def.name + ": compact in part");
        return new Member(access, name, true, compact, tag, null);
    }

    private static String wireName(Type type) {
        return type instanceof Type.DocumentedType documented ? documented.typeName() : type.toString();
    }

    private static boolean isCompact(Type type) {
        return wireName(type).startsWith("COMPACT_");
    }

    private static String primitive(Type type) {
        String name = wireName(type).replaceFirst("^COMPACT_", "").replaceFirst("^NULLABLE_", "").toLowerCase(Locale.ROOT);
        name = switch (name) {
            case "boolean" -> "bool";
            case "unsigned_int32" -> "uint32";
            default -> name;
        };
        require(PRIMITIVES.contains(name), "a type of the wire that is new: " + wireName(type));
        return name;
    }

    /** Arrays are a List, or a collection class of the message's own that extends a generic one. */
    private static Class<?> elementClass(Field access) {
        var generic = access.getGenericType();
        var parameterised = generic instanceof ParameterizedType p ? p : (ParameterizedType) ((Class<?>) generic).getGenericSuperclass();
        return (Class<?>) parameterised.getActualTypeArguments()[0];
    }

    @SuppressWarnings("unchecked")
    static Collection<Object> newCollection(Member member) throws ReflectiveOperationException {
        Class<?> type = member.access.getType();
        return type == List.class ? new ArrayList<>() : (Collection<Object>) type.getConstructor().newInstance();
    }

    // ------------------------------------------------------------------------------------------------ what may be null

    private void findNullable(Layout root, List<Member> path, short version) throws ReflectiveOperationException {
        for (Member member : members()) {
            var here = new ArrayList<>(path);
            here.add(member);
            if (!member.access.getType().isPrimitive()) member.nullable = takesNull(root, here, version);
            if (member.struct != null) member.struct.findNullable(root, here, version);
        }
    }

    /** Writes a message in which all is set but this; what can be written must be read as null again. */
    private static boolean takesNull(Layout root, List<Member> path, short version) throws ReflectiveOperationException {
        Member last = path.get(path.size() - 1);
        Object message = root.sample();
        last.access.set(holder(message, path), null);
        byte[] bytes;
        try {
            bytes = Official.write((org.apache.kafka.common.protocol.Message) message, version);
        } catch (NullPointerException e) {
            return false;
        }
        Object back = Official.read(root.type, ByteBuffer.wrap(bytes), version);
        require(last.access.get(holder(back, path)) == null, root.type + "." + last.name + ": null came back as something");
        return true;
    }

    private static Object holder(Object message, List<Member> path) throws ReflectiveOperationException {
        Object at = message;
        for (Member member : path.subList(0, path.size() - 1)) {
            Object value = member.access.get(at);
            at = member.array ? ((Collection<?>) value).iterator().next() : value;
        }
        return at;
    }

    private Object sample() throws ReflectiveOperationException {
        Object message = type.getConstructor().newInstance();
        for (Member member : members()) {
            Object value = member.struct != null ? member.struct.sample() : sample(member);
            if (member.array) {
                var collection = newCollection(member);
                collection.add(value);
                value = collection;
            }
            member.access.set(message, value);
        }
        return message;
    }

    private static Object sample(Member member) {
        return switch (member.type) {
            case "bool" -> true;
            case "int8" -> (byte) 1;
            case "int16" -> (short) 1;
            case "uint16", "int32" -> 1;
            case "uint32", "int64" -> 1L;
            case "float64" -> 1.5;
            case "uuid" -> new Uuid(1, 1);
            case "string" -> "x";
            case "bytes" -> bytesFor(member, new byte[] {1});
            case "records" -> MemoryRecords.readableRecords(ByteBuffer.wrap(new byte[] {1}));
            default -> throw new IllegalStateException(member.type);
        };
    }

    /** Fields of bytes are a byte[] or, for zero copies, a ByteBuffer. */
    static Object bytesFor(Member member, byte[] value) {
        return member.access.getType() == ByteBuffer.class ? ByteBuffer.wrap(value) : value;
    }
}
